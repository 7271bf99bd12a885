"""A real Slurm cluster on one machine, and the faults we inject into it.

Owns: namespaces, the daemons inside them, their configuration, and breaking them on purpose. Knows nothing of training.

How it stands up::

    host ---- nothing connects in or out ----
              ctl    munged, slurmctld (slurmdbd, mariadbd)   own network, PID, mount, IPC and host-name namespace
              login  users' commands                          ctl's network, own mounts and host name
              n1..   slurmd and jobs, one per node            own network, PID, mount, IPC and host-name namespace

Each of them lives as long as one small process, its *holder* (``holder.py``). No namespace has a name on the host and
no mount is made there, so when the processes are gone everything is gone; there is nothing else to clean up.
"""
