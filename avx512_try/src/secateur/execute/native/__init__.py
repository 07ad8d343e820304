"""Kernels for CPUs: written as LLVM instructions, built for this machine, run on the threads of torch."""
