{{- define "mediator.labels" -}}
app.kubernetes.io/name: mediator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- define "mediator.allLabels" -}}
{{ include "mediator.labels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}
