"""Modules that host and device share: errors, graph inputs and outputs, manifests, artifacts.

Libraries read these variables when they are imported, so every package of edgellm imports this one
first. ONNX Runtime since 1.29, the hub's client and Ray otherwise report their use to their makers.
"""

import os

NO_TELEMETRY = {
    "ORT_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
for _name, _value in NO_TELEMETRY.items():
    os.environ.setdefault(_name, _value)  # a user's own value stays
