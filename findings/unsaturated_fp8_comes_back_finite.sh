#!/usr/bin/env bash
# onnxruntime 1.32.0, beside the reference of onnx 1.23.2, on a CPU: Cast with saturate=0 to E4M3FN gives NaN beyond 464, and
# for 480 up to below 496 gives 448 again. To E5M2 it gives NaN for 61440 up to below 65536, and Inf from there on, where the
# specification of Cast and its reference have Inf throughout. QuantizeLinear does the same. With saturation both are right.
# Guessed before: as the reference, so NaN (E4M3FN) and Inf (E5M2) for all that is rounded beyond the maximum.
# So what: who casts without saturation to see what overflows counts less than there is. Python 3.11 or later.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet onnx==1.23.2 onnxruntime==1.32.0 ml_dtypes==0.6.0 numpy==2.4.6
"$folder/env/bin/python" - <<'END'
import numpy as np
import onnxruntime
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator


def both(operator: str, kind: int, values: list[float], saturate: int) -> tuple[np.ndarray, np.ndarray]:
    """Gives what the reference and the runtime return for values that are cast to kind and back."""
    one = [helper.make_tensor("one", TensorProto.FLOAT, [], [1.0])] if operator == "QuantizeLinear" else []
    to = {"output_dtype": kind} if one else {"to": kind}
    there = helper.make_node(operator, ["x", *(scale.name for scale in one)], ["small"], saturate=saturate, **to)
    nodes = [there, helper.make_node("Cast", ["small"], ["y"], to=TensorProto.FLOAT)]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None]) for name in "xy"]
    graph = helper.make_graph(nodes, "casts", ends[:1], ends[1:], one)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    given = {"x": np.array(values, np.float32)}
    runtime = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return ReferenceEvaluator(model).run(None, given)[0], runtime.run(None, given)[0]


def same(found: np.ndarray, wanted: list[float]) -> bool:
    return np.array_equal(found, np.array(wanted, np.float32), equal_nan=True)


nan, inf = float("nan"), float("inf")
e4m3, e5m2 = [464, 479, 480, 495, 496, -480, 1e4], [61000, 61440, -63000, 65535, 65536, 1e6]
for operator in ("Cast", "QuantizeLinear"):
    for values, kind, right, seen, largest in (
        (e4m3, TensorProto.FLOAT8E4M3FN, [448] + [nan] * 6, [448, nan, 448, 448, nan, -448, nan], 448),
        (e5m2, TensorProto.FLOAT8E5M2, [57344, inf, -inf, inf, inf, inf], [57344, nan, nan, nan, inf, inf], 57344),
    ):
        reference, runtime = both(operator, kind, values, saturate=0)
        print(operator, values, "reference:", reference, "runtime:", runtime)
        assert same(reference, right) and same(runtime, seen)
        assert all(same(found, np.clip(values, -largest, largest).tolist()) for found in both(operator, kind, values, saturate=1))
END
