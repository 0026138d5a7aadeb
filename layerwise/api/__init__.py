"""One call: any training loop becomes layer-wise parallel (`parallelize`, `fit`, `split`)."""
