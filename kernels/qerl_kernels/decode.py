"""Placeholder until the decode GEMM lands."""


def supported(weight, rows, dtype):
    return False


def decode_gemm(x, weight, row_scale, bias=None, lora=None):
    raise NotImplementedError
