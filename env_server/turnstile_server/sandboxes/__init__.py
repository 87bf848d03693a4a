"""Where agents and tests run: Docker containers or bubblewrap, with one small helper inside."""
