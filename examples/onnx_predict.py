"""Classify an image with an exported model, using numpy and onnxruntime only.

    torchcaps export runs/capsnet_digits-digits-1 --format onnx --out model.onnx
    python onnx_predict.py model.onnx digit.npy

The image is a .npy file with bytes [height, width] or [height, width, channels] of the size that the model expects.
"""

import json
import os
import sys

import numpy as np

os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # read when onnxruntime is imported
import onnxruntime


def main(model: str, image: str) -> None:
    """Print the three classes with the highest scores."""
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    texts = session.get_modelmeta().custom_metadata_map
    meta = {key: json.loads(texts[key]) for key in ("classes", "image", "scale", "mean", "std")}
    pixels = np.load(image, allow_pickle=False).astype(np.float32)
    pixels = pixels.reshape(*pixels.shape[:2], -1).transpose(2, 0, 1)  # [channels, height, width]
    if list(pixels.shape) != meta["image"]:
        sys.exit(f"expected an image of {meta['image']}, got {list(pixels.shape)}")
    mean, std = (np.array(meta[key], np.float32)[:, None, None] for key in ("mean", "std"))
    pixels = (pixels / meta["scale"] - mean) / std
    scores = session.run(["scores"], {"images": pixels[None]})[0][0]
    for index in np.argsort(-scores)[:3]:
        print(f"{meta['classes'][index]:>12} {scores[index]:.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
