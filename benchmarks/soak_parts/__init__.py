"""Parts of the soak: the light agent, the server with a window into its event loop, what is sampled."""
