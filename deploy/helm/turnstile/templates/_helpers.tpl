{{- define "turnstile.sandboxes" -}}{{ .Values.sandboxes.namespace | default .Release.Namespace }}{{- end }}
{{- define "turnstile.selector" -}}
app.kubernetes.io/name: turnstile
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- define "turnstile.labels" -}}
{{ include "turnstile.selector" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}
{{- define "turnstile.waitingPod" -}}
{{- $memory := int64 (.pool.memoryMb | default 1024) }}
{{- $disk := int64 (.pool.diskMb | default 512) }}
{{- $cpu := printf "%dm" (int64 (mulf (float64 (.pool.cpus | default 1)) 1000.0)) }}
{{- $bounds := dict "cpu" $cpu "memory" (printf "%dMi" $memory) }}
{{- $folders := concat (list "/tmp" "/dev/shm" "/run/turnstile" "/home/harness" "/home/agent" "/home/work") (.pool.folders | default list) }}
{{- if .pool.imageFiles }}
{{- $_ := set $bounds "ephemeral-storage" (printf "%dMi" (add 4096 $disk)) }}
{{- else }}
{{- $folders = append $folders "/workspace" }}
{{- end }}
restartPolicy: Never
terminationGracePeriodSeconds: 1
automountServiceAccountToken: false
enableServiceLinks: false
hostname: sandbox
dnsPolicy: None
dnsConfig: { nameservers: [127.0.0.1] }
nodeSelector:
  kubernetes.io/os: linux
  {{- with .Values.sandboxes.arch }}
  kubernetes.io/arch: {{ . }}
  {{- end }}
securityContext:
  seccompProfile: { type: RuntimeDefault }
volumes:
  - { name: files, emptyDir: { sizeLimit: 4Gi } }
  - { name: disk, emptyDir: { medium: Memory, sizeLimit: {{ mul $disk 896 }}Ki } }
  - { name: tests, emptyDir: { medium: Memory, sizeLimit: {{ mul $disk 128 }}Ki } }
containers:
  - name: sandbox
    image: {{ .pool.image | quote }}
    command: [/bin/sh, -c, 'IFS= read -r line && eval "$line"']
    stdin: true
    stdinOnce: true
    terminationMessagePolicy: FallbackToLogsOnError
    resources: { requests: {{ toJson $bounds }}, limits: {{ toJson $bounds }} }
    securityContext:
      runAsUser: 0
      runAsGroup: 0
      privileged: false
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: {{ not .pool.imageFiles }}
      capabilities:
        drop: [ALL]
        add: [SETUID, SETGID, SETPCAP, KILL{{ if .pool.imageFiles }}, CHOWN, DAC_OVERRIDE{{ end }}]
    volumeMounts:
      - { name: files, mountPath: /turnstile, subPath: turnstile, readOnly: true }
      - { name: files, mountPath: /opt/turnstile, subPath: installs, readOnly: true }
      {{- range $folders }}
      - { name: disk, mountPath: {{ . }}, subPath: {{ trimAll "/" . | replace "/" "%2F" | quote }} }
      {{- end }}
      - { name: tests, mountPath: /home/tests, subPath: home }
  - name: files
    image: {{ .Values.sandboxes.image | quote }}
    command: [/bin/sh, -c, 'IFS= read -r line && eval "$line"']
    stdin: true
    stdinOnce: true
    resources: { requests: { cpu: 100m, memory: 64Mi }, limits: { cpu: 100m, memory: 64Mi } }
    securityContext:
      runAsUser: 0
      runAsGroup: 0
      privileged: false
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      capabilities: { drop: [ALL], add: [CHOWN] }
    volumeMounts:
      - { name: files, mountPath: /turnstile-files }
      - { name: disk, mountPath: /turnstile-disk }
      - { name: tests, mountPath: /turnstile-tests }
{{- end }}
