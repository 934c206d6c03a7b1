"""Asks TensorFlow for its GPUs and prints one JSON object; runs by itself in an image of the user's, Python 2.7 too."""

import json

import tensorflow as tf

version = str(tf.__version__)
if version.startswith("1."):
    from tensorflow.python.client import device_lib

    count = sum(one.device_type == "GPU" for one in device_lib.list_local_devices())
else:
    count = len(tf.config.list_physical_devices("GPU"))
# Since 2.3.
cuda = tf.sysconfig.get_build_info().get("cuda_version") if hasattr(tf.sysconfig, "get_build_info") else ""
built_with_cuda = bool(tf.test.is_built_with_cuda())
print(json.dumps({"version": version, "count": count, "built_with_cuda": built_with_cuda, "cuda": str(cuda or "")}))
