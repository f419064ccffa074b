"""What is written on disk for Triton: model repositories, read and made."""
