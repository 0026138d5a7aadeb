"""The zoo: published networks at reduced size, imported, planned and run against PyTorch on one device."""
