"""Work for several servers of one model: edgellm's on devices, or others that speak OpenAI's."""
