"""Forecast the workspace of CPU operators: the memory that their kernels allocate internally.

Start with `operator_workspace.py`.

- `bf16_convolution_workspace.py`: Workspace of a bfloat16 convolution on a CPU with AVX-512 and no AMX tiles.
- `convolution_workspace.py`: Workspace of a convolution on a CPU, depending on the algorithm that torch and oneDNN
  choose.
- `im2col_workspace.py`: Workspace of a convolution that torch computes by im2col: 16-bit types, on a CPU without
  AVX-512.
- `operator_workspace.py`: Workspace of CPU operators: the memory that they use in addition to their tensors.
"""
