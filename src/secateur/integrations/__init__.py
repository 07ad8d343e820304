"""Thin adapters for other libraries. Import the one that you need: each imports its library, and the others do not.

`huggingface` and `lightning`: a callback for the trainer of each. `averaging`: averages (EMA, SWA) that keep zeros. `onnx`:
`to_onnx`. `adapters`: `merge_lora_`. `scikit`: metrics of scikit-learn as `evaluate` functions. Accelerate needs no adapter:
`accelerator.register_for_checkpointing(pruner)`.
"""
