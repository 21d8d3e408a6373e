"""Translation of messages with gettext catalogues."""
