"""What front-end processes and the owner of admission, store and limits exchange."""
