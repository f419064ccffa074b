"""What the server's routes say of themselves, and the OpenAPI document that is made of it."""
