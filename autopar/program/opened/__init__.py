"""What `from_jaxpr` opens when it reads a jaxpr: equations that stand for programs of other equations."""
