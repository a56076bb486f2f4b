"""The demo: one GRPO-like step, dense and through the store, each in a process of its own."""
