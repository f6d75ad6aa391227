"""What all servers of the package share: the socket, and the guard before the application."""
