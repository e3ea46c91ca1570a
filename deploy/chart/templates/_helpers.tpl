{{- define "baton.fullname" -}}
{{- if contains "baton" .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-baton" .Release.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "baton.authSecret" -}}
{{ .Values.auth.existingSecret | default (printf "%s-auth" (include "baton.fullname" .)) }}
{{- end }}

{{- define "baton.labels" -}}
{{ include "baton.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- end }}

{{/* What selects the pods of one part: {root, service, model} */}}
{{- define "baton.selector" -}}
app.kubernetes.io/name: baton
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .service }}
{{- with .model }}
baton/model: {{ .key }}
{{- end }}
{{- end }}

{{- define "baton.image" -}}
{{- $image := ternary .root.Values.cudaImage .root.Values.image (gt (int .gpus) 0) -}}
{{ $image.repository }}:{{ $image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{- define "baton.container" -}}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "baton.password" -}}
valueFrom: {secretKeyRef: {name: {{ include "baton.authSecret" .root }}, key: {{ .user }}}}
{{- end }}

{{/* Environment of every service: {root, service, extra} */}}
{{- define "baton.env" -}}
{{- $name := include "baton.fullname" .root -}}
- name: BATON_BUS_URL
  value: {{ ternary "tls" "nats" (ne .root.Values.tls.secret "") }}://{{ $name }}-nats:4222
- name: BATON_BUS_USER
  value: {{ .service }}
- name: BATON_BUS_PASSWORD
  {{- include "baton.password" (dict "root" .root "user" .service) | nindent 2 }}
- name: BATON_TELEMETRY_LOG_FORMAT
  value: json
- name: BATON_WORKER_GRACE_MS
  value: {{ mul .root.Values.drainSeconds 1000 | quote }}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- if .root.Values.tls.secret }}
- {name: BATON_BUS_TLS_CA, value: /tls/ca.crt}
- {name: BATON_WORKER_TLS_CA, value: /tls/ca.crt}
- {name: BATON_WORKER_TLS_CERT, value: /tls/tls.crt}
- {name: BATON_WORKER_TLS_KEY, value: /tls/tls.key}
{{- end }}
{{- range $key, $value := merge (dict) (.extra | default dict) .root.Values.env }}
- name: {{ $key }}
  value: {{ $value | quote }}
{{- end }}
{{- end }}

{{- define "baton.probes" -}}
startupProbe:
  exec: {command: [baton, doctor, --probe, alive]}
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: 150
readinessProbe:
  exec: {command: [baton, doctor, --probe, ready]}
  periodSeconds: 5
  timeoutSeconds: 5
livenessProbe:
  exec: {command: [baton, doctor, --probe, alive]}
  periodSeconds: 20
  timeoutSeconds: 10
  failureThreshold: 3
{{- end }}

{{/* What all pods have in common, below `spec:` */}}
{{- define "baton.pod" -}}
enableServiceLinks: false
automountServiceAccountToken: false
terminationGracePeriodSeconds: {{ add .Values.drainSeconds 15 }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "baton.mounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if .Values.tls.secret }}
- {name: tls, mountPath: /tls, readOnly: true}
{{- end }}
{{- end }}

{{- define "baton.volumes" -}}
- {name: tmp, emptyDir: {medium: Memory, sizeLimit: 64Mi}}
{{- if .Values.tls.secret }}
- {name: tls, secret: {secretName: {{ .Values.tls.secret }}}}
{{- end }}
{{- end }}

{{- define "baton.modelsVolume" -}}
- name: models
  {{- if .Values.modelStore.claim }}
  persistentVolumeClaim: {claimName: {{ .Values.modelStore.claim }}}
  {{- else }}
  emptyDir: {sizeLimit: {{ .Values.modelStore.sizeLimit }}}
  {{- end }}
{{- end }}

{{/* Takes the model before the service starts: {root, model, gpus} */}}
{{- define "baton.pull" -}}
- name: pull
  image: {{ include "baton.image" . }}
  {{- include "baton.container" .root | nindent 2 }}
  args: [pull, {{ .model.name | quote }}]
  env: [{name: BATON_MODEL_CACHE_DIR, value: /models}]
  resources: {requests: {cpu: 100m, memory: 128Mi}, limits: {memory: 1Gi}}
  volumeMounts:
    - {name: models, mountPath: /models}
    - {name: tmp, mountPath: /tmp}
{{- end }}
