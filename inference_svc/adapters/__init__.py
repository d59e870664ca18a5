"""What connects the inference service to gRPC, engines and hardware."""
