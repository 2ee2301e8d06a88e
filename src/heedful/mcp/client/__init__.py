"""The servers themselves: processes, connections, their questions to the person, and the manager of them all."""
