"""tiercache: a store for training activations over device memory, host memory and disk."""
