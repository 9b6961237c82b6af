"""All nodes whose kernels are edgellm's."""

from __future__ import annotations

from edgellm.device_runtime.runners.tensorrt.library import (
    attention_nodes,
    expert_nodes,
    recurrent_nodes,
    vocabulary_nodes,
)

PLUGINS = (
    *attention_nodes.PLUGINS,
    *recurrent_nodes.PLUGINS,
    *expert_nodes.PLUGINS,
    *vocabulary_nodes.PLUGINS,
)
ONLY_KERNELS = {each.name for each in (*recurrent_nodes.PLUGINS, *expert_nodes.PLUGINS)}
NODES = tuple(plugin.name for plugin in PLUGINS)
