# %%
# # Export and run without torchcaps
#
# Write a network as an ONNX file, check it, and classify an image with numpy and onnxruntime only.

import json
import os
import subprocess
import sys
from pathlib import Path

os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # read when onnxruntime is imported

import numpy as np

import torchcaps
from torchcaps.data import create_dataset
from torchcaps.export import export_run

OUT = Path(sys.argv[1] if len(sys.argv) > 1 else "tutorial-output")
OUT.mkdir(parents=True, exist_ok=True)

# %%
# ## A trained network
#
# One epoch is enough here.

fitted = torchcaps.fit(
    "capsnet_small", "digits", epochs=1, num_threads=1, out=OUT / "export-run", quiet=True, figures=False
)
run = torchcaps.load_run(fitted.path)

# %%
# ## Export
#
# The file is compared with the network before it is written, at batch sizes other than that of the traced example.

exported = export_run(run, OUT / "model.onnx")
print(exported)

# %%
# ## Run it without torchcaps
#
# A program of its own: only numpy and onnxruntime. The metadata of the file has the classes and the scaling of
# pixels.

program = """
import json, sys
import numpy as np, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
meta = {key: json.loads(value) for key, value in session.get_modelmeta().custom_metadata_map.items()}
pixels = np.load(sys.argv[2]).astype(np.float32)
pixels = (pixels / meta["scale"] - np.float32(meta["mean"])[:, None, None]) / np.float32(meta["std"])[:, None, None]
scores = session.run(["scores"], {"images": pixels[None]})[0][0]
assert "torch" not in sys.modules and "torchcaps" not in sys.modules
print(json.dumps({"class": meta["classes"][int(scores.argmax())], "score": float(scores.max())}))
"""
test = create_dataset("digits", "test")
image = test.images[0].numpy()
np.save(OUT / "digit.npy", image)
command = [sys.executable, "-c", program, str(OUT / "model.onnx"), str(OUT / "digit.npy")]
answer = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
print("onnxruntime says", answer)

# %%
# [onnx_predict.py](../../examples/onnx_predict.py) is this program as a file. Quantisation, latency and other
# formats: [export and deploy](../export.md).
