"""What connects the state service to gRPC and to its stores."""
