"""`/openapi.json`: what this gateway serves, in the words of OpenAPI 3.1."""
