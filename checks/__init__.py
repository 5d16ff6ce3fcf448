"""Code that asserts something about what ships. It measures nothing: what measures is in bench/."""
