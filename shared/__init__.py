"""What more than one service uses; never imports a service."""
