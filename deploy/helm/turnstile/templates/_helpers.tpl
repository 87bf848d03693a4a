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
