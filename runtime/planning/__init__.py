"""Planning a job before any weights are there: a step walked on tensors without bytes, priced for a machine."""
