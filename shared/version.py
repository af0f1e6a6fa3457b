"""The project's version, for services that run from a source tree and from an image alike."""

VERSION = "0.1.0"
