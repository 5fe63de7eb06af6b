"""What computes the heavy parts of a policy and of the engine that samples from it, behind one protocol.

`protocol.py` says what is computed; `torch_` is the plain truth and always there, `cpu` computes in C, `gpu`
by recordings. `choose.py` chooses. Tests hold each of them to `torch_`.
"""
