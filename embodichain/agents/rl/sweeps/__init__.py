"""Many runs that belong together: several seeds of one config, or a search for better settings."""
