import configparser

config = configparser.ConfigParser()
config.read("server.ini")
assert {name: dict(config[name]) for name in config.sections()} == {
    "server": {"host": "127.0.0.1", "port": "8443", "workers": "4", "debug": config["server"]["debug"]},
    "tls": {"enabled": config["tls"]["enabled"], "min_version": config["tls"]["min_version"]},
    "limits": {"max_body": "1048576"},
}
assert not config.getboolean("server", "debug")
assert config.getboolean("tls", "enabled")
assert config["tls"]["min_version"] in ("1.2", "1.3")
