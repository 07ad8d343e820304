"""CPU kernels, written as LLVM IR, compiled for this machine and run on torch's threads."""
