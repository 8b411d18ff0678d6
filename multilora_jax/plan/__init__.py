"""What a configuration takes of its devices: by arithmetic, and by compiling the step for a mesh that is not there."""
