"""Which CUDA driver library a program gets: on this host, in an image, in a running container. Reads only."""
