"""The gRPC side: `inference.GRPCInferenceService`, on the stubs that tritonclient ships."""
