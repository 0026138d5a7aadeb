"""What each rank of a benchmark on an emulated cluster runs; the commands beside this folder start it."""
