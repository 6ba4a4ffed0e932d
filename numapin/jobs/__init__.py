"""Job scripts that start bound ranks under a resource manager, for `numapin job`.

Each engine has one function for it. The folder templates has manifests, and the parts of shell scripts that are always
the same.

::

    request.py      the user's request, checked, and its share of a machine
    notation.py     times and container images, as users type them and as each engine takes them
    scripts.py      sbatch, mpirun, qsub, bsub
    kubernetes.py   kubectl apply: checks, and the values of the templates
    pod_options.py  the user's additions to pods: variables, volumes, ...
    manifest.py     fill the templates of manifests in
"""
