"""What a layer is: shape, names in the checkpoint, sharding rule and method. Values only: no weights, no device, no kernel."""
