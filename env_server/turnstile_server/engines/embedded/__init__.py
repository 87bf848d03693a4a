"""The laptop engine: a child process with torch on CPU that speaks the subset of SGLang's interface we use."""
