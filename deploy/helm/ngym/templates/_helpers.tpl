{{/* The name of an object of a service, such as RELEASE-calculator-agent-0; (list $ NAME INDEX). At most 63 characters:
a longer one is cut before its index, and gets a digest in place of the rest. */}}
{{- define "ngym.name" -}}
{{- $root := index . 0 -}}
{{- $base := printf "%s-%s" $root.Release.Name (index . 1 | replace "_" "-" | lower) -}}
{{- $index := printf "-%d" (int (index . 2)) -}}
{{- $most := sub 63 (len $index) | int -}}
{{- if gt (len $base) $most -}}
{{- $base = printf "%s-%s" ($base | trunc (sub $most 9 | int) | trimSuffix "-") (sha256sum $base | trunc 8) -}}
{{- end -}}
{{- printf "%s%s" $base $index -}}
{{- end -}}

{{- define "ngym.labels" -}}
app.kubernetes.io/name: ngym
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{/* Number of replicas of a stanza, each of them one pod; (list NAME STANZA) */}}
{{- define "ngym.replicas" -}}
{{- $replicas := (index . 1).replicas | default 1 -}}
{{- if not (regexMatch "^[1-9][0-9]*$" (toString $replicas)) -}}
{{- fail (printf "config.%s.replicas: must be a number here; got %v" (index . 0) $replicas) -}}
{{- end -}}
{{- if gt (int ((index . 1).nodes | default 1)) 1 -}}
{{- fail (printf "config.%s.nodes: this chart starts one pod for each replica; a replica on several machines needs ng_submit kuberay" (index . 0)) -}}
{{- end -}}
{{- $replicas -}}
{{- end -}}

{{- define "ngym.secret" -}}
{{- .Values.existingSecret | default (printf "%s-tokens" .Release.Name) -}}
{{- end -}}
