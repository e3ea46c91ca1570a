"""What `baton up` does after its checks: starts, follows, restarts and stops the processes of one machine."""
