"""LoRAX's own routes: POST /generate, /generate_stream and /. Their client is the package
`lorax-client`.
"""
