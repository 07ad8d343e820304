"""The package imports no other framework before an adapter of it is used."""

import subprocess
import sys

FRAMEWORKS = ["transformers", "lightning", "pytorch_lightning", "peft", "accelerate", "onnx", "onnxscript", "sklearn", "rich"]


def test_frameworks_are_imported_with_their_adapters_only():
    code = f"""
import sys, torch, secateur as sc, secateur.integrations
model = torch.nn.Sequential(torch.nn.Linear(8, 8))
before = set(sys.modules)
sc.prune_(model, sparsity=0.5)
sc.merge_lora_, sc.to_onnx, sc.shrink, sc.save, sc.compress_
import secateur.integrations.averaging
print([name for name in {FRAMEWORKS!r} if name in set(sys.modules) - before])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
