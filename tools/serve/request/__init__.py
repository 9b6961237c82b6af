"""Parts of requests: images, tools, seeds."""
