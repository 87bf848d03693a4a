# The task's image, in which its tests ran once, so that what they fetch is there: tasks/rehearsal.py.
ARG TASK_IMAGE
FROM ${TASK_IMAGE}
ARG TASK_WORKDIR
ARG TASK_PROGRAM
USER 0:0
SHELL ["/bin/sh", "-c"]
COPY . /tests
# Their own home outlives this, since users of sandboxes have an empty one. Of the work folder nothing may be changed.
RUN set -eu; \
    mkdir -p "${TASK_WORKDIR:-.}"; cd "${TASK_WORKDIR:-.}"; work=$(pwd -P); home=/opt/turnstile/tests; \
    if [ "$work" = / ]; then echo "the whole file system is no work folder"; exit 1; fi; \
    mkdir -p "$home" /logs/verifier /logs/agent /logs/artifacts; \
    kept=$(mktemp -d); cp -a "$work/." "$kept/"; \
    chmod +x "/tests/$TASK_PROGRAM"; \
    HOME=$home DEBIAN_FRONTEND=noninteractive "/tests/$TASK_PROGRAM" < /dev/null 2>&1 || echo "they ended with $?"; \
    cd "$work"; for entry in ./* ./.[!.]* ./..?*; do rm -rf "$entry"; done; cd /; \
    cp -a "$kept/." "$work/"; rm -rf "$kept" /tests /logs; \
    chmod -R a+rwX "$home"
