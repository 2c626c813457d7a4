"""What a plugin's author and sidestream's own tests share; none of it is needed to run."""
