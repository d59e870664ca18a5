"""What connects the execution service to gRPC."""
