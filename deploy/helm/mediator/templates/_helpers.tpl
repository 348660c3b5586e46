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
{{- /* Not those of the service: its Service, budget and policy choose pods by them. */}}
{{- define "mediator.pipelineLabels" -}}
app.kubernetes.io/name: mediator-pipeline
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}
{{- /* A container that runs a command of the pipeline on the volume of an instance. */}}
{{- define "mediator.pipelineStep" -}}
{{- $pipeline := .root.Values.pipeline -}}
- name: {{ .command }}
  image: "{{ $pipeline.image.repository }}:{{ $pipeline.image.tag | default .root.Chart.AppVersion }}"
  imagePullPolicy: {{ $pipeline.image.pullPolicy }}
  args:
    - pipeline
    - {{ .command }}
    - --config
    - /etc/mediator/mediator.toml
    {{- if $pipeline.lakeClaim }}
    - --lake
    - /lake/mediator
    {{- end }}
    {{- if ne .command "report" }}
    {{- range $key, $value := $pipeline.conf }}
    - --conf
    - {{ printf "%s=%v" $key $value | quote }}
    {{- end }}
    {{- end }}
  env:
    - {name: MEDIATOR_INSTANCE, value: {{ .pod }}}
  {{- with .root.Values.existingSecret }}
  envFrom:
    - secretRef: {name: {{ . }}}
  {{- end }}
  securityContext:
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities: {drop: [ALL]}
  resources: {{- toYaml $pipeline.resources | nindent 4 }}
  volumeMounts:
    - {name: data, mountPath: /data}
    {{- if $pipeline.lakeClaim }}
    - {name: lake, mountPath: /lake}
    {{- end }}
    - {name: settings, mountPath: /etc/mediator, readOnly: true}
    - {name: tmp, mountPath: /tmp}
{{- end }}
