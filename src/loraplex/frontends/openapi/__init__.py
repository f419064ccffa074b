"""Descriptions of the server's routes, and the OpenAPI document made of them."""
